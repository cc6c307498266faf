"""The documents are true: their commands run, their tables are the program's, their links lead."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import typer

import aiter_prep
import tiny
from aiter_prep import demo, errors, manifest
from aiter_prep.cli import app, flags, main
from aiter_prep.execution import execute
from aiter_prep.layouts.permutation import Layout
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import Checkpoint, open_checkpoint
from aiter_prep.storage.object_store import STORES
from aiter_prep.storage.reader import FolderReader
from aiter_prep.targets.table import TARGETS
from support import fixture

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(ROOT.joinpath("docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS]
BY_NAME = [pytest.param(path, id=path.name) for path in DOCUMENTS]

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
SECONDS = re.compile(r"\b\d+(\.\d+)? s\b")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The contents of the fenced blocks of a language."""
    return [content for _, found, content in FENCE.findall(text) if found == language]


def prose(text: str) -> str:
    return FENCE.sub("", text)


def section(text: str, title: str) -> str:
    """What stands below a heading, up to the next of the same level or a higher one."""
    level, rest = re.split(rf"^(#+) {re.escape(title)}\n", text, maxsplit=1, flags=re.MULTILINE)[1:]
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The rows of the first table, without its head."""
    table = re.search(r"(?:^\|.*\n)+", f"{text}\n", re.MULTILINE)
    assert table is not None
    return [
        [cell.strip() for cell in line[1:-1].split(" | ")] for line in table[0].splitlines()[2:]
    ]


def code(text: str) -> list[str]:
    """The words that are set as code."""
    return re.findall(r"`([^`]+)`", text)


# --- generated tables ---------------------------------------------------------------------------


@cache
def generator() -> ModuleType:
    path = ROOT / "scripts" / "support_table.py"
    spec = importlib.util.spec_from_file_location("support_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["README.md", "docs/format.md", "docs/targets.md"])
def test_the_generated_tables_are_current(name: str) -> None:
    text = text_of(name)
    assert generator().updated(text) == text, "scripts/support-table --write brings it up to date"


def test_every_generated_table_has_a_place() -> None:
    everything = "".join(text_of(name) for name in generator().DOCUMENTS)
    for name in generator().GENERATORS:
        assert generator().block(name).search(everything), name
    engines = {f"paths of {target.engine}" for target in TARGETS.values()}
    assert engines <= set(generator().GENERATORS)


# --- links --------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", BY_NAME)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", prose(text)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), link
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), link


def test_every_document_is_listed_in_the_readme() -> None:
    listed = section(text_of("README.md"), "Documents")
    for path in DOCS:
        assert f"](docs/{path.name})" in listed


def test_files_that_are_named_exist() -> None:
    named = re.compile(r"`((?:aiter_prep|docs|scripts|tests)/[\w./-]+)`")
    made_by_the_reader = {
        "aiter_prep/targets/aiter_a16w4.py",
        "aiter_prep/targets/vllm_0_34.py",
        "tests/unit/test_target_aiter_a16w4.py",
    }
    for path in DOCUMENTS:
        for name in named.findall(path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists() or name in made_by_the_reader, f"{path.name}: {name}"


# --- commands -----------------------------------------------------------------------------------


@cache
def commands() -> dict[str, Any]:
    """The commands of the program, by name."""
    group: Any = typer.main.get_command(app.build([]))
    return dict(group.commands)


def lines_of_shell(text: str) -> Iterator[str]:
    for language in ("sh", "console"):
        for block in blocks(text, language):
            for line in block.splitlines():
                if language == "sh" or line.startswith("$ "):
                    yield re.sub(r"  \[.*\]$", "", line.removeprefix("$ "))


def calls_in(line: str) -> Iterator[list[str]]:
    """The arguments of every call of the program in a line of shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.wordchars += "${}:@,?"
    words = list(lexer)
    for start, word in enumerate(words):
        if word == "aiter-prep":
            rest = words[start + 1 :]
            ends = [i for i, word in enumerate(rest) if set(word) <= set("();<>|&")]
            yield rest[: min(ends, default=len(rest))]


def documented_calls() -> list[list[str]]:
    found: list[list[str]] = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for line in lines_of_shell(text):
            found += calls_in(line)
        for span in code(prose(text)):
            if span.startswith("aiter-prep "):
                found += calls_in(span)
    return found


@pytest.mark.parametrize("arguments", documented_calls(), ids=" ".join)
def test_every_documented_call_is_one_that_the_program_takes(arguments: list[str]) -> None:
    command = commands()[arguments[0]]
    if arguments[1:]:  # else it is only mentioned
        command.make_context(arguments[0], arguments[1:])


def test_there_are_calls_to_check() -> None:
    assert len(documented_calls()) > 20


def own_flags() -> set[str]:
    parameters = (p for command in commands().values() for p in command.params)
    return {flag for parameter in parameters for flag in parameter.opts} | {"--help", "--version"}


def test_every_flag_that_is_named_exists() -> None:
    of_scripts = {"--check", "--dir", "--folder", "--memory", "--torch", "--turn", "--write"}
    of_engines = {"--load-format", "--model-loader-extra-config", "--moe-runner-backend"}
    known = own_flags() | of_scripts | of_engines
    for path in DOCUMENTS:
        for span in code(prose(path.read_text(encoding="utf-8"))):
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", span):
                assert flag in known, f"{path.name}: {flag}"


def test_the_readme_lists_every_command() -> None:
    _, head, below = text_of("README.md").partition("| command | does |\n")
    listed = [code(call)[0].split()[0] for call, _ in rows(head + below)]
    assert sorted(listed) == sorted(commands())


# --- sessions -----------------------------------------------------------------------------------


def session(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Each command of a session, with the lines that it prints."""
    command: list[str] | None = None
    printed: list[str] = []
    for block in blocks(text, "console"):
        for line in block.splitlines():
            # `demo` prints commands, too; ours are those before which nothing is left to print
            if line.startswith("$ aiter-prep ") and "  [" not in line:
                if command is not None:
                    yield command, printed
                command, printed = shlex.split(line)[2:], []
            else:
                printed.append(line)
    assert command is not None
    yield command, printed


def same(printed: list[str], expected: list[str]) -> bool:
    """Whether lines are as expected; a line `...` stands for any number of them."""
    if "..." not in expected:
        return printed == expected
    at = expected.index("...")
    return printed[:at] == expected[:at] and any(
        same(printed[skip:], expected[at + 1 :]) for skip in range(at, len(printed) + 1)
    )


def timeless(text: str) -> list[str]:
    return [SECONDS.sub("0.0 s", line) for line in text.splitlines()]


def test_the_session_of_the_readme_is_what_the_program_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("aiter_prep.backends.rocm.local_chips", lambda: ())
    for arguments, lines in session(text_of("README.md")):
        main(arguments)
        said = capsys.readouterr()
        printed, expected = timeless(said.out + said.err), timeless("\n".join(lines))
        assert same(printed, expected), "\n".join(["$ aiter-prep", *arguments, *printed])


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with the checkpoint that the examples read."""
    demo.make_checkpoint(tmp_path / "models" / "demo-moe")
    return tmp_path


SHELL_BLOCKS = [b for b in blocks(text_of("docs/scripting.md"), "sh") if "aiter-prep" in b]


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=lambda block: block.splitlines()[0])
def test_the_shell_examples_run(block: str, workplace: Path) -> None:
    own = Path(sys.executable).parent
    done = subprocess.run(
        ["/bin/bash", "-c", block],
        cwd=workplace,
        env={**os.environ, "PATH": f"{own}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


SIGNATURES = [code(row[0])[0] for row in rows(section(text_of("docs/scripting.md"), "From Python"))]
NEED_TORCH = ("load(", "attach(")


def python_examples() -> list[tuple[str, str]]:
    """The examples of the documents' Python sections."""
    names = ("README.md", "docs/scripting.md")
    return [(name, blocks(section(text_of(name), "From Python"), "python")[0]) for name in names]


@pytest.mark.parametrize(("name", "example"), python_examples())
def test_the_python_examples_run(
    name: str, example: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "try").symlink_to("models")
    monkeypatch.chdir(workplace)
    exec(compile(example, name, "exec"), {})  # noqa: S102 - that is what is tested
    assert any(workplace.glob("*restored/model.safetensors"))


@pytest.mark.parametrize("call", [c for c in SIGNATURES if not c.startswith(NEED_TORCH)])
def test_the_functions_take_what_is_listed(call: str) -> None:
    name, _, parameters = call.rstrip(")").partition("(")
    listed = re.findall(r"(?:^|, )(\w+)", parameters)
    assert listed == list(inspect.signature(getattr(aiter_prep, name)).parameters)


def test_the_readmes_python_takes_eight_lines() -> None:
    _, example = python_examples()[0]
    assert len([line for line in example.splitlines() if line]) <= 8


# --- the worked example -------------------------------------------------------------------------


def worked_example() -> Callable[[Path, str, int], np.ndarray[Any, np.dtype[np.uint8]]]:
    text = text_of("docs/format.md").partition("<!-- worked example -->\n")[2]
    names: dict[str, Any] = {"__name__": "worked_example"}
    example = blocks(text, "python")[0]
    exec(compile(example, "docs/format.md", "exec"), names)  # noqa: S102 - what is tested
    found: Callable[[Path, str, int], np.ndarray[Any, np.dtype[np.uint8]]] = names["source_matrix"]
    return found


def source_bytes(checkpoint: Checkpoint, name: str, expert: int | None, size: int) -> bytes:
    """The bytes of an expert's matrix in the source."""
    info = checkpoint.tensors[name]
    data = np.empty(size, np.uint8)
    with FolderReader(checkpoint.folder) as reader:
        reader.read_into(info.file, info.start + (expert or 0) * size, data)
    return data.tobytes()


UNDONE: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("mxfp4", {"tp": 2}),
    "vllm": ("mxfp4", {"tp": 2, "target": "vllm"}),
    "experts": ("mxfp4", {"ep": 3, "placement": "round_robin"}),
    "gfx942": ("fp8", {"tp": 2, "gfx": "gfx942"}),
    "gpt-oss": ("gpt_oss-mxfp4", {"tp": 4}),
    "minimax": ("minimax_m3-mxfp8", {"tp": 2, "target": "vllm"}),
    "compressed": ("qwen3_moe-ct-mxfp4", {"tp": 3}),
}


@pytest.mark.parametrize("case", UNDONE)
def test_the_worked_example_brings_every_source_matrix_back(case: str, tmp_path: Path) -> None:
    kind, options = UNDONE[case]
    if kind == "mxfp4":
        demo.make_checkpoint(tmp_path / "source")
        source = tmp_path / "source"
    elif kind == "fp8":  # with negative zeros, which gfx942 has no byte for
        source = tiny.write(tmp_path / "source", kind="fp8_block_f32", hidden=256, intermediate=256)
    else:
        source = fixture(kind)
    checkpoint = open_checkpoint(source)
    folder = tmp_path / "prepared"
    written = execute(make_plan(checkpoint, **options), folder, workers=2)
    source_matrix = worked_example()
    parts = {(s.pattern, s.fused): r for r in written.tensors for s in r.source}
    compared = 0
    for pattern, fused in parts:
        for expert in (0, 1):
            matrix = source_matrix(folder, pattern, expert)
            name = pattern.replace("{expert}", str(expert))
            wanted = source_bytes(checkpoint, name, expert if fused else None, matrix.size)
            assert matrix.tobytes() == wanted, name
            compared += 1
    assert compared >= 4
    if kind == "fp8":
        assert any(record.lost for record in written.tensors)


# --- tables -------------------------------------------------------------------------------------


def failures(kind: type[errors.AiterPrepError]) -> set[int]:
    below = (number for sub in kind.__subclasses__() for number in failures(sub))
    return {kind.exit_code, *below}


@pytest.mark.parametrize("name", ["README.md", "docs/scripting.md"])
def test_the_exit_codes_are_those_of_the_errors(name: str) -> None:
    table = {int(number): meaning for number, meaning in rows(section(text_of(name), "Exit codes"))}
    assert table == flags.EXIT_CODES
    assert set(table) == {0} | failures(errors.AiterPrepError)


def test_the_environment_variables_are_those_of_the_flags() -> None:
    table = rows(section(text_of("docs/scripting.md"), "Environment variables"))
    parameters = [p for command in commands().values() for p in command.params if p.envvar]
    flags_of = {parameter.envvar: set(parameter.opts) for parameter in parameters}
    listed = {code(variable)[0]: code(flag)[0] for variable, flag in table}
    assert set(listed) == set(flags_of)
    assert [v for v, flag in listed.items() if flag not in flags_of[v]] == []


def field_names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


MANIFEST_TABLES = [
    ("The manifest", manifest.Manifest, {"self_digest"}, set()),
    ("Shards in the manifest", manifest.ShardRecord, set(), set()),
    ("Tensors in the manifest", manifest.TensorRecord, set(), set()),
    ("Slices", manifest.SourceSlice, set(), set()),
    ("Layouts", Layout, set(), {"name"}),
]


@pytest.mark.parametrize(("title", "kind", "more", "less"), MANIFEST_TABLES)
def test_the_format_lists_every_field(
    title: str, kind: type, more: set[str], less: set[str]
) -> None:
    table = rows(section(text_of("docs/format.md"), title))
    listed = [key for row in table for key in code(row[0])]
    assert len(listed) == len(set(listed))
    assert set(listed) == (field_names(kind) | more) - less


def test_the_format_lists_what_is_lost_and_the_fields_of_objects(tmp_path: Path) -> None:
    text = text_of("docs/format.md")
    lost = text.partition("`lost` says where:")[2]
    assert {key for row in rows(lost) for key in code(row[0])} == field_names(manifest.Lost)

    demo.make_checkpoint(tmp_path / "source")
    execute(make_plan(open_checkpoint(tmp_path / "source")), tmp_path / "out", workers=2)
    document = json.loads((tmp_path / "out" / "aiter_prep.json").read_bytes())
    described = {code(row[0])[0]: row[2] for row in rows(section(text, "The manifest"))}
    for key in ("created_by", "target", "model", "options"):
        assert set(code(described[key])) == set(document[key]), key
    of_blocks = rows(text.partition("`model.blocks` describes each experts module:")[2])
    listed = {key for row in of_blocks for key in code(row[0])}
    assert listed == set(document["model"]["blocks"][0])


def test_the_format_lists_what_the_schema_lets_in() -> None:
    text = text_of("docs/format.md")
    schema = json.loads((ROOT / "aiter_prep" / "manifest.schema.json").read_text("utf-8"))
    defined = schema["$defs"]
    forms = next(o["enum"] for o in defined["tensor"]["properties"]["form"]["anyOf"] if "enum" in o)
    assert [code(row[0])[0] for row in rows(text.partition("**Forms.**")[2])] == forms
    orders = defined["block"]["properties"]["row_order"]["enum"]
    of_blocks = {code(row[0])[0]: row[2] for row in rows(text.partition("`model.blocks`")[2])}
    assert code(of_blocks["row_order"]) == orders
    maker = schema["properties"]["created_by"]["properties"]
    of_all = {code(row[0])[0]: row[2] for row in rows(section(text, "The manifest"))}
    of_aiter = text.partition("Where AITER moved the bytes, ")[2].partition(".\n")[0]
    assert {*code(of_all["created_by"]), *code(of_aiter)} == {"created_by", *maker}


# --- JSON ---------------------------------------------------------------------------------------


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main([*arguments, "--json", "-q"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_json_objects_have_the_keys_that_are_listed(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setitem(STORES, "memory", "fsspec")
    source = "models/demo-moe"
    (workplace / "begun").mkdir()
    (workplace / "begun" / ".aiter_prep.journal").touch()
    calls = [
        ["convert", source, "out", "--tp", "2"],
        ["convert", source, "sizes", "--tp", "1", "--tp", "2"],
        ["convert", source, "shared", "--tp", "2", "--part", "1/1"],
        ["seal", "shared"],
        ["convert", source, "other", "--tp", "2", "--dry-run"],
        ["convert", source, "other", "--tp", "1", "--tp", "2", "--dry-run"],
        ["verify", "out"],
        ["inspect", source],
        ["inspect", "out"],
        ["inspect", "begun"],
        ["restore", "out", "restored"],
        ["push", "out", "memory://documents/out"],
        ["layouts"],
        ["layouts", "show", "e8m0"],
        ["env"],
        ["demo", "demo"],
        ["convert", source, "out", "--tp", "2"],
    ]
    table = rows(section(text_of("docs/scripting.md"), "Output"))
    assert len(table) == len(calls)
    for (schema, _, keys), arguments in zip(table, calls, strict=True):
        found = answer(arguments, capsys)
        assert found["schema"] == code(schema)[0]
        assert set(found) == {"schema", *code(keys)}, arguments


# --- facts about other files --------------------------------------------------------------------


def test_the_paths_of_the_comparison_with_vllm_exist() -> None:
    pytest.importorskip("conformance.paths")
    from conformance.paths import PATHS

    compared = section(text_of("docs/targets.md"), "What was compared with vLLM's own code")
    for _, names in rows(compared):
        assert set(code(names)) <= set(PATHS)


def test_the_sources_that_comments_name_are_listed() -> None:
    listed = section(text_of("docs/design.md"), "Sources")
    for path in ROOT.joinpath("aiter_prep").rglob("*.py"):
        for name in re.findall(r"[Mm]irrors\s+(?:#\s+)?(?:vllm\s+)?(\S+)", path.read_text("utf-8")):
            file = name.partition("::")[0].rstrip(":").rpartition("/")[2]
            assert file.partition(".")[0] in listed, f"{path.name}: {name}"
