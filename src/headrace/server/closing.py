"""An owner is ended in a thread of its own: none waits behind another one that hangs.

The threads of asyncio's executor are few, and the end of the process waits for each of them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress

from headrace.errors import HeadraceError
from headrace.runtime.owner_link import OwnerLink

_log = logging.getLogger("headrace.server")


async def closed(name: str, link: OwnerLink, grace_s: float) -> None:
    """Until the owner of decoder `name` is ended: see `OwnerLink.close`. Its failure is logged."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def close() -> None:
        try:
            link.close(grace_s)
        except HeadraceError as exc:
            _log.error("the owner of %s was not ended: %s", name, exc)
        finally:
            with suppress(RuntimeError):  # nobody waits any more: the loop is closed
                loop.call_soon_threadsafe(over.set)

    try:
        threading.Thread(target=close, name=f"headrace-close-{name}", daemon=True).start()
    except RuntimeError:  # this host has no thread for it: by one that is there, behind others
        await asyncio.to_thread(close)
    await over.wait()
