"""What /tokenize holds while it is answered; what it answers is in test_app.py."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")

from headrace.server.encoding import Encoding
from headrace.server.tokenizing import Tokenizing
from tests.server_stand import MODEL, Client, Stand, run, served_model


def test_a_body_is_held_until_its_client_has_read_the_answer() -> None:
    async def test() -> None:
        stand = Stand()
        tokenizing = Tokenizing({MODEL: served_model()}, 1 << 10, Encoding())
        body = b'{"prompt": "hi"}'
        client = Client(tokenizing, "/tokenize", body, state={"client": "a"})
        client.reads = False
        await stand.until(lambda: client.num_sends == 1)
        assert tokenizing._budget.nbytes == len(body)
        client.leave()
        await stand.done(client)
        assert tokenizing._budget.nbytes == 0

    run(test)
