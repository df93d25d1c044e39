"""Notices from clouds that they are about to take a machine away.

    NoticeOptions  which cloud to listen to, from --rdzv-conf
    watch          listen, and report each notice once
    Watcher        listens until it is closed
    CloudNotice    what was heard, from whichever cloud

The watchers only listen. Their owner decides what to do about a notice. They use threads: start them after a fork,
never before.
"""

from elastic3d.notices.notice import CloudNotice, NoticeKind
from elastic3d.notices.options import Choice, NoticeOptions
from elastic3d.notices.watcher import Watcher
from elastic3d.notices.watching import watch

__all__ = ["NoticeKind", "CloudNotice", "Choice", "NoticeOptions", "Watcher", "watch"]
