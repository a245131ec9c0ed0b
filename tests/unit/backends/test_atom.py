"""The ATOM decoder itself: what it says of itself, what it counts, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.backends import atom
from headrace.backends.base import Decoder, Reservation, ReserveFailed
from headrace.engine.atom.record import Verified
from headrace.errors import Closed, LocalProtocolError, Refused, WouldBlock
from headrace.geometry import Full, Sliding
from headrace.testing.atom_cases import HYBRID, LLAMA, Case
from headrace.testing.atom_ground import Bench, check_copies, decode, imported, serve
from headrace.testing.fake_rebellions import FakeRebellions
from tests.e2e.families import directory_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(directory_of("llama"), directory_of("gemma3"))
    yield bench
    bench.close()


def test_it_is_a_decoder_of_one_lane(bench: Bench) -> None:
    with bench.decoder(HYBRID) as (decoder, _):
        as_decoder: Decoder = decoder
        manifest = as_decoder.manifest()
        assert [type(layer.kind) for layer in manifest.layers] == [Sliding, Full] * 2
        assert (manifest.role, manifest.max_positions, manifest.vocab_size) == ("decoder", 64, 128)
        assert manifest.layouts == ("head_major", "token_major")
        assert (decoder.caps.max_lanes, decoder.caps.decode_batch) == (1, 1)
        assert decoder.caps.reads_back
        assert not decoder.caps.device_events
        assert decoder.facts == {
            "sdk": "fake rebellions",
            "fake-rebellions": "1",
            "driver": "fake",
            "attention": "flash_attn",
            "block": 8,
            "number_format": "declared",
            "sub_blocks": False,
            "clears": False,
            "threads": 1,
            "cast": "float32 to float32: exact",
        }


def test_each_head_and_width_is_the_layers_own() -> None:
    bench = Bench(directory_of("llama"), directory_of("gemma4"))
    with bench.decoder(HYBRID) as (decoder, _):
        widths = {layer.parts[0].head_dim for layer in decoder.manifest().layers}
        assert widths == {16, 32}
    bench.close()


def test_the_lane_is_counted_by_its_state(bench: Bench) -> None:
    def state() -> list[int]:
        counts = decoder.statistics()
        return [counts[f"lanes_{name}"] for name in ("free", "reserved", "published")]

    with bench.decoder(LLAMA) as (decoder, _):
        assert state() == [1, 0, 0]
        reservation = imported(decoder, bench.slot(decoder, LLAMA, 9))
        assert state() == [0, 1, 0]
        entry = decoder.publish(reservation)
        assert state() == [0, 0, 1]
        decoder.free(entry)
        assert state() == [1, 0, 0]
        assert all(type(value) is int for value in decoder.statistics().values())


def test_once_closed_it_is_closed(bench: Bench) -> None:
    with bench.decoder(LLAMA) as (decoder, _):
        slot = bench.slot(decoder, LLAMA, 9)
        held = imported(decoder, slot)
        for _ in range(2):
            decoder.close()
        for act in (
            lambda: decoder.reserve(1),
            lambda: decoder.begin_import(held, slot.view, slot.copies()),
            lambda: decoder.publish(held),
            lambda: decoder.free(held),
            lambda: decoder.read(held, "head_major", slot.copies()[0]),
            lambda: decoder.decode_step([]),
        ):
            with pytest.raises(Closed, match="the atom decoder was closed"):
                act()
        assert decoder.statistics()["lanes_free"] == 1


def test_a_shorter_context_ends_the_lane_earlier(bench: Bench) -> None:
    with bench.decoder(LLAMA, context=10) as (decoder, _):
        with pytest.raises(LocalProtocolError, match="11 tokens, the lane holds 1 to 10"):
            decoder.reserve(11)
        entry = decoder.publish(imported(decoder, bench.slot(decoder, LLAMA, 9)))
        decoder.decode_step([(entry, 1)])
        with pytest.raises(LocalProtocolError, match="the lane is full: 10 of 10 positions"):
            decoder.decode_step([(entry, 1)])
        with pytest.raises(WouldBlock, match="the one lane is taken"):
            decoder.reserve(5)


def test_a_context_that_was_not_compiled_is_refused(bench: Bench) -> None:
    with (
        pytest.raises(Refused, match="context is 65, and the model was compiled for 64") as raised,
        bench.decoder(LLAMA, context=65),
    ):
        pass
    assert raised.value.field == "context"


def test_a_lossy_cast_says_how_to_allow_it(bench: Bench) -> None:
    text = r'float32 to float16: lossy: a value may change .*"lossy": true.*compile the model for'
    with (
        pytest.raises(Refused, match=text) as raised,
        bench.decoder(Case(declared="float16")),
    ):
        pass
    assert raised.value.field == "lossy"


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", ""])
def test_a_dtype_that_is_not_supported_is_refused_by_name(bench: Bench, dtype: str) -> None:
    options = atom.Options(str(directory_of("llama")), str(bench.compiled(LLAMA)), dtype=dtype)
    with pytest.raises(Refused, match=f"the source sends {dtype}, which is") as raised:
        _opened(options)
    assert raised.value.field == "dtype"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"lanes": 2}, "lanes"),
        ({"model": None}, "model"),
        ({"threads": 0}, "threads"),
        ({"context": 0}, "context"),
        ({"device": -1}, "device"),
        ({"lossy": "yes"}, "lossy"),
    ],
)
def test_an_option_that_is_none_is_refused_by_name(given: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused, match=f"options of atom: .*{text}") as raised:
        atom.open({"model": "m", "compiled": "c"} | given)
    assert raised.value.field == "options"


@pytest.mark.parametrize("config", [None, "[]", "{}", '{"vocab_size": "many"}', "{"])
def test_a_checkpoint_without_a_vocabulary_is_refused(
    bench: Bench, tmp_path: Path, config: str | None
) -> None:
    model = tmp_path / "model"
    shutil.copytree(directory_of("llama"), model)
    path = model / "config.json"
    path.unlink()
    if config is not None:
        path.write_text(config)
    with pytest.raises(Refused, match=r"config\.json") as raised:
        _opened(atom.Options(str(model), str(bench.compiled(LLAMA))))
    assert raised.value.field == "model"


def test_a_vocabulary_may_be_that_of_a_text_model(bench: Bench, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(directory_of("llama"), model)
    path = model / "config.json"
    path.write_text(json.dumps({"text_config": json.loads(path.read_text())}))
    decoder = _opened(atom.Options(str(model), str(bench.compiled(LLAMA))))
    assert decoder.manifest().vocab_size == 128
    decoder.close()


def test_a_made_up_reservation_is_no_reservation(bench: Bench) -> None:
    with bench.decoder(LLAMA) as (decoder, _):
        held = decoder.reserve(9)
        made_up = (Reservation(0, 9, held.serial + 1), Reservation(0, 8, held.serial))
        for each in (*made_up, Reservation(1, 9, held.serial)):
            with pytest.raises(LocalProtocolError, match="is not what the lane holds"):
                decoder.free(each)
        decoder.free(held)


def _opened(options: atom.Options) -> atom.AtomDecoder:
    found = Verified("declared", sub_blocks=False, clears=False, warms_up=False)
    return atom.decoder_on(FakeRebellions().sdk(), found, options)


def test_what_is_held_is_read_in_either_layout(bench: Bench) -> None:
    """And no more of a window once a step has moved it on."""
    with bench.decoder(HYBRID) as (decoder, _):
        slot = bench.slot(decoder, HYBRID, 16)
        held = imported(decoder, slot)
        check_copies(decoder, held, slot, slot.copies())
        entry = decoder.publish(held)
        check_copies(decoder, entry, slot, slot.copies())
        decoder.decode_step([(entry, 1)])
        window, full = slot.copies()[0], slot.copies()[2]
        check_copies(decoder, entry, slot, [full])
        text = r"positions \[0, 16\) of layer 0: its window moved on"
        with pytest.raises(LocalProtocolError, match=text):
            decoder.read(entry, "head_major", window)


def test_what_is_no_place_is_told(bench: Bench) -> None:
    with bench.decoder(LLAMA) as (decoder, _):
        slot = bench.slot(decoder, LLAMA, 9)
        held = imported(decoder, slot)
        copy = slot.copies()[0]
        for bad, text in (
            (copy._replace(layer=4), "layer 4, the model has 4"),
            (copy._replace(part=2), r"part 2 of layers\.0"),
        ):
            with pytest.raises(LocalProtocolError, match=text):
                decoder.read(held, "head_major", bad)
            with pytest.raises(LocalProtocolError, match=text):
                decoder.begin_import(held, slot.view, [bad])


def test_a_step_is_of_one_entry_and_a_known_token(bench: Bench) -> None:
    with bench.decoder(LLAMA) as (decoder, _):
        entry = decoder.publish(imported(decoder, bench.slot(decoder, LLAMA, 9)))
        with pytest.raises(LocalProtocolError, match="2 entries in a step of one lane"):
            decoder.decode_step([(entry, 1), (entry, 1)])
        for token in (-1, 128):
            text = rf"token {token}, the vocabulary is \[0, 128\)"
            with pytest.raises(LocalProtocolError, match=text):
                decoder.decode_step([(entry, token)])
        assert decode(decoder, entry) == bench.right(LLAMA, 9).rows


def test_a_lane_that_was_not_cleared_is_taken(bench: Bench) -> None:
    with bench.decoder(LLAMA, clears=True) as (decoder, fake):
        fake.card.fail_update()
        with pytest.raises(ReserveFailed, match="the lane was not cleared: update of") as raised:
            decoder.reserve(9)
        assert raised.value.reservation == Reservation(0, 9, 1)
        with pytest.raises(WouldBlock):
            decoder.reserve(9)
        decoder.free(raised.value.reservation)
        serve(bench, decoder, fake, LLAMA, 9)
