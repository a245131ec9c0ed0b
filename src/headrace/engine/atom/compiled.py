"""A compiled decoder on a card: the few calls that are made of it, all from one thread.

Two of them are private to the vendor's runtime, and may vanish with a newer one: whether they are
there is asked when it is loaded. All are synchronous: what they were asked to do is done when they
return. Nothing here knows what the caches hold.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch

from headrace.engine.atom.blocks import LANE, block_table
from headrace.engine.atom.caches import Cache, read_caches
from headrace.engine.atom.mirrors import Mirror
from headrace.engine.atom.sdk import VENDOR, Sdk
from headrace.engine.faults import line_of, raised_as
from headrace.errors import BackendUnavailable, DeviceError, LocalProtocolError, Refused

CALLS: Final = ("_update_kv_cache", "_fetch_kv_cache")
SIZE_CALL: Final = "_get_kv_cache_size"
VERSIONS: Final = "Use the versions that docs/atom.md names"


class CompiledDecoder:
    """The decoder that optimum-rbln compiled into a directory, of which lane 0 is used.

    caches: of all layers, keys before values. positions: most that the lane holds.
    """

    def __init__(self, sdk: Sdk, directory: str, device: int) -> None:
        """Loads it onto card number `device`.

        Raises:
            BackendUnavailable: it cannot be loaded, or lacks a call that is needed.
            Refused: it is not compiled as it has to be; the text says how.
        """
        self._thread = threading.get_ident()
        self._inside = ""
        self._model = _load(sdk, directory, device)
        try:
            self.config = self._model.rbln_config
            self._runtime = self._model.prefill_decoder.runtime
        except AttributeError as exc:
            raise BackendUnavailable(
                VENDOR, "api_missing", "the loaded model", line_of(exc), VERSIONS
            ) from exc
        check_calls(self._runtime)
        _check_one_card(self.config)
        self.caches: tuple[Cache, ...] = self._read_caches()
        self._decode = self._decoder_of_one()
        full = [each for each in self.caches if each.kind == "full"]
        longest = int(self.config.max_seq_len)
        self.positions = min([longest, *(each.blocks * each.rows for each in full)])
        self._tables = self._block_tables(full, longest)
        self._masked = bool(self.config.use_attention_mask and self.config.use_position_ids)

    @property
    def max_positions(self) -> int:
        """Positions that its graphs were compiled for."""
        return int(self.config.max_seq_len)

    def has_sizes(self) -> bool:
        """Whether the runtime can tell how large a cache is."""
        return hasattr(self._runtime, SIZE_CALL)

    def nbytes_of(self, cache: Cache) -> int:
        """Bytes of a cache on the card. Raises: DeviceError."""
        with self._called(f"the size of {cache.name}"):
            return int(self._runtime._get_kv_cache_size(cache.name))

    def update(self, cache: Cache, mirror: Mirror, block: int, rows: int) -> None:
        """Copy rows [0, `rows`) of a block from its mirror to the card.

        Raises:
            DeviceError: the runtime failed; what the card holds is not known.
        """
        with self._called(f"update of block {block} of {cache.name}"):
            self._runtime._update_kv_cache(mirror.host, block, 0, rows, cache.name)

    def fetch(self, cache: Cache, mirror: Mirror, block: int, rows: int) -> None:
        """Copy rows [0, `rows`) of a block from the card into a mirror. Raises: DeviceError."""
        with self._called(f"fetch of block {block} of {cache.name}"):
            self._runtime._fetch_kv_cache(mirror.host, block, 0, rows, cache.name)

    def prefill(self, tokens: Sequence[int]) -> torch.Tensor:
        """Have the card prefill the lane by itself; returns the last row of logits, float32.

        Raises:
            DeviceError: it failed.
        """
        ids = torch.tensor([list(tokens)], dtype=torch.int64)
        at = torch.arange(len(tokens), dtype=torch.int32)[None]
        tables = {name: table[0] for name, table in self._tables.items()}
        with self._called(f"a prefill of {len(tokens)} tokens"):
            made = self._model.prefill_decoder(
                input_ids=ids, cache_position=at, batch_idx=LANE, **tables
            )
            return self._row(made.logits)

    def decode(self, token: int, position: int) -> torch.Tensor:
        """Compute one token at `position`; returns its row of logits, float32 [vocabulary].

        The tables are passed each time: without them the vendor's page manager would free and hand
        out the lane's blocks by itself.

        Raises:
            DeviceError: it failed.
        """
        given: dict[str, torch.Tensor] = dict(self._tables)
        if self._masked:
            given["attention_mask"] = self._mask(position)
            given["position_ids"] = torch.tensor([[position]], dtype=torch.int32)
        with self._called(f"a decode step at position {position}"):
            made = self._decode(
                input_ids=torch.tensor([[token]], dtype=torch.int64),
                cache_position=torch.tensor([[position]], dtype=torch.int32),
                **given,
            )
            return self._row(made.logits)

    def check_thread(self, what: str) -> None:
        """Raises: LocalProtocolError: this is not the thread that loaded it."""
        if threading.get_ident() != self._thread:
            raise LocalProtocolError(f"{what} from a second thread: the runtime is one thread's")

    def _enter(self, what: str) -> None:
        """One call at a time: what the runtime does of one within another is not known."""
        self.check_thread(what)
        if self._inside:
            raise LocalProtocolError(f"{what} within {self._inside}")
        self._inside = what

    @contextmanager
    def _called(self, what: str) -> Iterator[None]:
        self._enter(what)
        try:
            with raised_as(lambda why: DeviceError(f"{what} failed: {why}")):
                yield
        finally:
            self._inside = ""

    def _row(self, logits: torch.Tensor) -> torch.Tensor:
        # What the card writes next may go to the same memory.
        return logits.reshape(-1, logits.shape[-1])[-1].to(torch.float32, copy=True)

    def _mask(self, position: int) -> torch.Tensor:
        mask = torch.zeros(1, self.max_positions, dtype=self.config.dtype)
        mask[:, : position + 1] = 1
        return mask

    def _read_caches(self) -> tuple[Cache, ...]:
        """By the metadata, but for the blocks of full attention: where their number was left to
        the compiler, it was found after the metadata was written.
        """
        caches = read_caches(self.config.cache_metas)
        blocks = getattr(self.config, "kvcache_num_blocks", None)
        if not blocks:
            return caches
        return tuple(
            replace(each, blocks=int(blocks)) if each.kind == "full" else each for each in caches
        )

    def _decoder_of_one(self) -> Any:
        try:
            return self._model.decoders[1]
        except (AttributeError, KeyError, TypeError) as exc:
            raise Refused(
                "the compiled model has no decoder for one sequence; compile it with "
                "rbln_batch_size=1",
                field="compiled",
            ) from exc

    def _block_tables(self, full: Sequence[Cache], longest: int) -> dict[str, torch.Tensor]:
        """The tables that the model takes: both, or one of them, never none."""
        tables: dict[str, torch.Tensor] = {}
        if full:
            blocks = block_table(longest // full[0].rows, full[0].blocks)
            tables["block_tables"] = torch.tensor([blocks], dtype=torch.int16)
        if len(full) < len(self.caches):
            tables["local_block_tables"] = torch.tensor([[LANE]], dtype=torch.int16)
        return tables


def _load(sdk: Sdk, directory: str, device: int) -> Any:
    hint = "Check the card with rbln-smi, and that the directory was compiled for it"
    with raised_as(lambda why: BackendUnavailable(VENDOR, "no_device", "load", why, hint)):
        try:
            return sdk.load(directory, device)
        except (FileNotFoundError, KeyError, ValueError) as exc:
            raise Refused(
                f"{directory} holds no compiled model that can be loaded ({line_of(exc)}); compile "
                "it again",
                field="compiled",
            ) from exc


def _check_one_card(config: Any) -> None:
    num_devices = getattr(config, "num_devices", None) or 1
    if num_devices > 1:
        raise Refused(
            f"the model was compiled for {num_devices} cards, and a lane on one is supported; "
            "compile it for one",
            field="compiled",
        )


def check_calls(runtime: Any) -> None:
    """Raises: BackendUnavailable: api_missing: the runtime has not the private calls."""
    missing = [name for name in CALLS if not callable(getattr(runtime, name, None))]
    if missing:
        raise BackendUnavailable(
            VENDOR,
            "api_missing",
            "the runtime's private calls",
            f"it has no {' and no '.join(missing)}",
            f"{VERSIONS}; without these calls no cache can be imported",
        )
