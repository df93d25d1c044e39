"""One page about a live job: what `elastic3d dashboard` serves.

`reading` asks etcd (and, where there are any, the event files) on one thread, and makes a `document`; `view` renders
it as fragments of HTML; `feed` keeps the newest ones and their differences for all browsers alike; `serving` is the
web application, `access` who may use it, `orders` what a browser may order. `store_reading` reads the store on another
thread: `store_listing` says what, `store_view` renders it.
"""
