"""What clouds say before they take a machine away.

    Options    which cloud to listen to, from --rdzv-conf
    watch      listen, and tell each notice once
    Watcher    what listens, until it is closed
    Notice     what was heard, whoever said it

The watchers only hear. What becomes of a notice is the business of who is told. Threads: open after a fork, never
before.
"""

from elastic3d.notices.notice import CloudNotice, NoticeKind
from elastic3d.notices.options import Choice, NoticeOptions
from elastic3d.notices.watcher import Watcher
from elastic3d.notices.watching import watch

__all__ = ["NoticeKind", "CloudNotice", "Choice", "NoticeOptions", "Watcher", "watch"]
