"""Generates tokens on this CPU with vLLM, and writes them down with their log-probabilities.

Runs inside the conformance environment, never in the product's own:

    python -m conformance.generate JOBS.json

`JOBS.json` is a list of objects: `model`, `load_format`, `tp`, `variables` for the environment, and
`out`, the file that gets a list with one object for each prompt, or `{"failure": ...}`. Each job is
a process of its own, forked after the engine was imported; its workers are forked from there.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from conformance.forks import run_each

PROMPTS = ([3, 17, 42, 99, 5], list(range(20, 44)))
TOKENS = 8
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # else a C++ compiler builds a sampler of few lines first
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}


def generated(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Tokens and log-probabilities for each prompt."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=job["model"],
        load_format=job["load_format"],
        tensor_parallel_size=job["tp"],
        distributed_executor_backend="mp" if job["tp"] > 1 else "uni",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        seed=0,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=5, detokenize=False
    )
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    results = [request.outputs[0] for request in engine.generate(prompts, sampling, use_tqdm=False)]
    return [
        {
            "tokens": list(result.token_ids),
            "logprobs": [
                {str(token): entry.logprob for token, entry in place.items()}
                for place in result.logprobs
            ],
        }
        for result in results
    ]


def run_job(job: dict[str, Any]) -> None:
    """Generates, and writes down what came of it."""
    os.environ.update(job["variables"])
    # a core for each rank, else they wait for each other's spinning threads
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(job["tp"])))
    try:
        result: Any = generated(job)
    except BaseException:  # noqa: BLE001  # the test shows it
        result = {"failure": traceback.format_exc()}
    Path(job["out"]).write_text(json.dumps(result))


def main() -> None:
    """Runs the command line."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    importlib.import_module("vllm.engine.arg_utils")
    importlib.import_module("vllm.model_executor.model_loader")
    run_each(run_job, json.loads(Path(sys.argv[1]).read_text()))


if __name__ == "__main__":
    main()
