"""Lets vLLM understand the wrapped quantisation config of a prepared folder."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.transformers_utils.config import HFConfigParser

from aiter_prep.engines.mismatch import EngineMismatch
from aiter_prep.engines.vllm.contract import running_version
from aiter_prep.storage.checkpoint import MANIFEST_FILE, METHOD
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEY = "quantization_config"


def is_prepared(model: object) -> bool:
    """Return whether a model's name is a local folder with our manifest."""
    return isinstance(model, (str, Path)) and (Path(model) / MANIFEST_FILE).is_file()


def unwrapped(config: dict[str, Any]) -> dict[str, Any]:
    """Return a `config.json` as the source had it."""
    config = _unwrap_one(config)
    text = config.get("text_config")
    if isinstance(text, dict):
        config["text_config"] = _unwrap_one(text)
    return config


def _unwrap_one(config: dict[str, Any]) -> dict[str, Any]:
    wrapped = config.get(_KEY)
    if not (isinstance(wrapped, dict) and wrapped.get("quant_method") == METHOD):
        return dict(config)
    source = wrapped.get("source")
    rest = {key: value for key, value in config.items() if key != _KEY}
    return rest if source is None else {**rest, _KEY: source}


class PreparedConfigParser(HFConfigParser):
    """Parses the config of a prepared folder as that of its source.

    Some config classes read the quantisation config while they are made, and models read it from
    the config again: both must see what the source says. Everything else is left to vLLM.
    """

    def parse(self, model: str | Path, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        """Parse a config; see `vllm.transformers_utils.config.HFConfigParser.parse`."""
        if not is_prepared(model):
            return super().parse(model, *args, **kwargs)  # type: ignore[no-any-return]
        running_version()
        with _reading_unwrapped():
            return super().parse(model, *args, **kwargs)  # type: ignore[no-any-return]


@contextmanager
def _reading_unwrapped() -> Iterator[None]:
    """Let transformers see the source's config wherever it reads a config's file meanwhile."""
    original = PreTrainedConfig.__dict__["get_config_dict"]

    def get_config_dict(cls: Any, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        config, rest = original.__func__(cls, *args, **kwargs)
        return unwrapped(config), rest

    PreTrainedConfig.get_config_dict = classmethod(get_config_dict)
    try:
        yield
    finally:
        PreTrainedConfig.get_config_dict = original


class AiterPrepConfig(QuantizationConfig):
    """Stands for a quantisation config that was not unwrapped, and refuses it by name.

    vLLM asks every registered method about every quantised model, before it looks for the method
    that the model names. A folder that can be served was unwrapped by then.
    """

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], *_args: Any, **_kwargs: Any
    ) -> None:
        """Refuse our own method; say nothing about any other.

        Raises:
            EngineMismatch: The config is that of a prepared folder.
        """
        if hf_quant_cfg.get("quant_method") == METHOD:
            running_version()
            raise EngineMismatch(
                f"the config names the method `{METHOD}`, but the model is no local folder with "
                f"`{printable(MANIFEST_FILE)}`, so nothing says what its bytes are",
                "bring the whole folder here with `hf download MODEL --local-dir FOLDER`, or "
                "finish it with `aiter-prep convert SOURCE OUT --resume`, and serve that folder",
            )

    def get_name(self) -> str:
        """Return the name of the method."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[Any]:
        """Return nothing: no model runs with this config."""
        return []

    @classmethod
    def get_min_capability(cls) -> int:
        """Return no demand: no model runs with this config."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no file: the config of a prepared folder is in `config.json`."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AiterPrepConfig:
        """Refuse; see `override_quantization_method`."""
        cls.override_quantization_method({**config, "quant_method": METHOD})
        raise AssertionError

    def get_quant_method(self, layer: Any, prefix: str) -> None:
        """Return nothing: no model runs with this config."""
