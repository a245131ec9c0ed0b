"""What a user is told of a checkpoint that does not load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.engine import loading
from headrace.errors import Refused


def test_a_missing_package_is_named_with_the_extra_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("needs a package\n  (`pip install package`)")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", missing)
    with pytest.raises(Refused) as caught:
        loading.load_model(tmp_path)
    assert caught.value.field == "model"
    assert str(caught.value) == (
        f"{tmp_path} needs one more package to load (needs a package (`pip install package`)); "
        "for FP8 checkpoints run pip install 'headrace[fp8]'"
    )
