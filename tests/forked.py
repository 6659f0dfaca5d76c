"""Scripts that start with nothing but their imports: these are done once, in a process of its own.

That process is forked for each run, so what a run imports, uses and holds in memory is its own.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Ended", "run_forked"]

_SERVER = """
import json, os, sys
imports, script, runs, together = json.load(sys.stdin)
names = {"__name__": "__main__"}
exec(imports, names)
code = compile(script, "script", "exec")
children, ends = {}, {}
def wait():
    child, status = os.wait()
    ends[children[child]] = os.waitstatus_to_exitcode(status)
for number, (args, environment) in enumerate(runs):
    child = os.fork()
    if child == 0:
        for descriptor, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{kind}", os.O_WRONLY | os.O_CREAT), descriptor)
        os.environ.update(environment)
        sys.argv[1:] = args
        status = 0
        try:
            exec(code, names)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else end.code is not None
        sys.stdout.flush()
        sys.stderr.flush()
        # What it has in memory need not be taken apart.
        os._exit(status)
    children[child] = number
    if not together:
        wait()
while len(ends) < len(runs):
    wait()
print(json.dumps([ends[number] for number in range(len(runs))]))
"""


class Ended(NamedTuple):
    """How a run ended."""

    returncode: int
    stdout: str
    stderr: str


def run_forked(
    imports: str,
    script: str,
    runs: Iterable[Iterable[object]],
    *,
    environments: Iterable[Mapping[str, str]] | None = None,
    together: bool = False,
) -> list[Ended]:
    """Run a script once for each list of arguments, `sys.argv[1:]`; return how each run ended.

    Parameters
    ----------
    imports
        What is done once, before the forks.
    script
        What each of them does.
    runs
        The arguments of each.
    environments
        What each sets in its environment, if anything.
    together
        Whether all run at once.
    """
    words = [list(map(str, args)) for args in runs]
    variables = [{}] * len(words) if environments is None else list(map(dict, environments))
    with tempfile.TemporaryDirectory() as folder:
        given = [imports, script, list(zip(words, variables, strict=True)), together]
        served = subprocess.run(
            [sys.executable, "-c", _SERVER],
            input=json.dumps(given),
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert served.returncode == 0, served.stderr
        return [
            Ended(
                code,
                *(Path(folder, f"{number}.{kind}").read_text("utf-8") for kind in ("out", "err")),
            )
            for number, code in enumerate(json.loads(served.stdout))
        ]
