"""Who broke the rule decides what is torn down.

Every error that headrace raises on purpose derives from `HeadraceError`, and none derives from a
builtin such as `ValueError`, so that a broad `except ValueError` cannot swallow a protocol fault.
"""

from __future__ import annotations

import errno
from typing import Final

SHORTAGES: Final = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC})
"""The errnos of what this host, or a limit, has too little of just now."""


class HeadraceError(Exception):
    """Base of all errors that headrace raises on purpose."""


class LocalProtocolError(HeadraceError):
    """This process broke the protocol: a bug of ours, or of an engine or decoder that we run."""


class RemoteProtocolError(HeadraceError):
    """The peer broke the protocol: that attempt fails, both processes live on."""


class PeerDied(HeadraceError):
    """The process at the other end of a channel is gone."""


class DeviceError(HeadraceError):
    """A device operation failed; what it touched is quarantined until proven quiet."""


class Unquiet(HeadraceError):
    """An engine ended and its device may still write into the slot: only the end of its process
    proves that it does not, and ends it.
    """


class Closed(HeadraceError):
    """The object was closed by this side and is used again."""


class WouldBlock(HeadraceError):
    """Nothing to receive, or no room to send, without waiting."""


class Cancelled(HeadraceError):
    """The attempt was cancelled; raised out of the sink so that an engine stops at its next layer
    group.
    """


class Refused(HeadraceError):
    """A request or a pairing cannot be served as asked; the text says what to change.

    `field` names the manifest field or the option at fault, and is empty where there is none.
    `shortage`: nobody is mistaken; this host has too little memory, descriptors or processes just
    now.
    """

    def __init__(self, text: str, *, field: str = "", shortage: bool = False) -> None:
        super().__init__(text)
        self.field = field
        self.shortage = shortage


class BackendUnavailable(HeadraceError):
    """A backend cannot run here: which vendor, at which stage, what was probed, what was found and
    what to do.
    """

    def __init__(self, vendor: str, stage: str, probe: str, detail: str, hint: str) -> None:
        super().__init__(f"{vendor}: {stage}: {probe}: {detail}. {hint}")
        self.vendor = vendor
        self.stage = stage
        self.probe = probe
        self.detail = detail
        self.hint = hint
