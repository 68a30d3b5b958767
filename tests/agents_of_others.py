"""Where `make setup-agents` puts what others wrote, each in an environment of its own."""

from tests.conftest import ROOT


def python_of(name: str) -> str:
    python = ROOT / ".cache" / "agents" / name / "bin" / "python"
    assert python.exists(), "run `make setup-agents`"
    return str(python)
