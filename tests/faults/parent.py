"""The process above an owner, as a script: `python -m tests.faults.parent CONFIG TOKENS OPTIONS`.

It serves one request through an `OwnerClient` and prints what came of it as one JSON object. It may
stand still at `parent PLACE`: spawned, waits K (for the K-th message), up, prompt (its memfd is
made), submitted, token K, withdrawn, ended, shutdown (told the owner to end).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import msgspec

from headrace.channel import Channel
from headrace.process import ChildProcess
from headrace.runtime import owner_link
from headrace.runtime.config import OwnerConfig
from headrace.runtime.requests import RequestOptions
from headrace.runtime.router import OwnerClient
from tests.faults.stations import reach


def main(config: str, tokens: str, options: str) -> None:
    """Serve one request; an interrupt withdraws it."""
    _stand_around(ChildProcess, "spawn", after="parent spawned")
    _stand_around(Channel, "wait_readable", before="parent waits")
    _stand_around(owner_link, "memfd_with", after="parent prompt")
    _stand_around(ChildProcess, "close", before="parent shutdown")
    client = OwnerClient(msgspec.json.decode(config, type=OwnerConfig))
    try:
        client.start()
        reach("parent up")
        asked = msgspec.json.decode(options, type=RequestOptions)
        label = client.submit(json.loads(tokens), asked)
        reach("parent submitted")
        try:
            result = client.result(label, _token)
        except KeyboardInterrupt:
            client.withdraw(label)
            reach("parent withdrawn")
            result = client.result(label)
        reach("parent ended")
    finally:
        client.close()
    ended = result.ended
    print(json.dumps({"outcome": ended.outcome, "tokens": result.tokens, "kv": ended.kv_digests}))


_calls: Counter[str] = Counter()


def _token(_: int) -> bool:
    _calls["token"] += 1
    reach(f"parent token {_calls['token'] - 1}")
    return False


def _stand_around(holder: Any, name: str, *, before: str = "", after: str = "") -> None:
    inner = getattr(holder, name)

    def standing(*arguments: Any, **options: Any) -> Any:
        if before:
            number = _calls[name]
            _calls[name] += 1
            reach(f"{before} {number}")
        result = inner(*arguments, **options)
        if after:
            reach(after)
        return result

    setattr(holder, name, standing)


if __name__ == "__main__":
    main(*sys.argv[1:])
