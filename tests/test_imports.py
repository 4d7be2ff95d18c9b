"""What importing costs is asserted by what was imported, never by a clock."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ["torch", "numba", "transformers", "fastapi", "uvicorn", "zmq", "msgspec", "tokenizers"]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import octavo.core.plan, octavo.core.protocols, octavo.core.request",
        "import octavo.memory.paged, octavo.memory.request_slots",
        "import octavo.scheduling.scheduler, octavo.scheduling.admission",
        "import octavo.engine.core, octavo.simulate.executor, octavo.bench.simulator",
    ],
)
def test_policy_rooms_do_not_load_torch(statement: str) -> None:
    assert not modules_after(statement) & set(HEAVY)


def test_importing_octavo_loads_nothing_heavy() -> None:
    assert not modules_after("import octavo") & {*HEAVY, "numpy", "typer"}


def test_help_loads_nothing_heavy() -> None:
    statement = "import sys; sys.argv = ['octavo', '--help']\nfrom octavo.__main__ import main\n"
    statement += "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    assert not modules_after(statement) & {*HEAVY, "numpy"}


def test_public_names_can_be_imported() -> None:
    import octavo

    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = octavo.nothing
