"""Registers with vLLM what a prepared folder needs."""

from __future__ import annotations

from aiter_prep.storage.checkpoint import METHOD


def register() -> None:
    """Register the quantisation method and the load format `aiter_prep`; twice is harmless.

    vLLM calls this in each of its processes, through the entry point `vllm.general_plugins`.
    """
    from vllm.model_executor import model_loader
    from vllm.model_executor.layers import quantization
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.transformers_utils import config

    from aiter_prep.engines.vllm.config import AiterPrepConfig, PreparedConfigParser
    from aiter_prep.engines.vllm.guards import guard
    from aiter_prep.engines.vllm.loader import AiterPrepLoader

    # their tables, not `register_...`: these warn about a name that is there already
    parsers = config._CONFIG_FORMAT_TO_CONFIG_PARSER  # noqa: SLF001
    loaders = model_loader._LOAD_FORMAT_TO_MODEL_LOADER  # noqa: SLF001
    parsers["hf"] = PreparedConfigParser
    guard(set(loaders.values()), (AiterPrepLoader, DummyModelLoader))
    loaders[METHOD] = AiterPrepLoader
    quantization.register_quantization_config(METHOD)(AiterPrepConfig)
