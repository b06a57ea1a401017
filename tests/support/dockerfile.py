"""Execute the instructions of a Dockerfile below a folder of this machine, for tests where no image can be built.

The image's own folders are moved below that folder wherever an instruction names them. What is left out is said by `Image.left_out`:
the base image, and the packages of its distribution.
"""

import json
import os
import re
import shlex
import shutil
import string
import subprocess
from pathlib import Path

OWN_FOLDERS = ("opt/venv", "artifact", "results", "cache", "tmp")
PASSED_ON = re.compile(r"PIP_|SSL_CERT|REQUESTS_CA|CURL_CA|(http|https|no|all)_proxy$", re.IGNORECASE)
"""Variables of this machine that a build gets, as `docker build` gets them as build arguments."""


def instructions(text: str) -> list[tuple[str, str]]:
    """Split a Dockerfile into (keyword, rest), without comments; continued lines are joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]


def words(text: str) -> list[str]:
    """Return the words of an instruction in its JSON form, such as CMD ["a", "b"]."""
    return json.loads(text)


class Image:
    """A Dockerfile's environment and default command, below `root`.

    Args:
        dockerfile: it is read, and what it copies is taken from `context`, as far as git tracks it.
        python: the interpreter of the base image, under the name that the instructions use.
    """

    def __init__(self, dockerfile: Path, context: Path, root: Path, python: tuple[str, str]) -> None:
        self.instructions, self.context, self.root = instructions(dockerfile.read_text()), context, root
        name, interpreter = python
        (root / "bin").mkdir()
        (root / "tmp").mkdir()
        (root / "bin" / name).symlink_to(interpreter)
        self.env = {name: value for name, value in os.environ.items() if PASSED_ON.match(name)}
        self.env |= {"PATH": f"{root / 'bin'}:/usr/bin:/bin", "HOME": str(root / "tmp")}
        self.folder, self.entrypoint, self.command = root, "", []
        self.left_out: list[str] = []

    def placed(self, text: str) -> str:
        """Move the image's own folders below `root`."""
        return re.sub(rf"(?<![\w.])/({'|'.join(OWN_FOLDERS)})\b", rf"{self.root}/\1", text)

    def build(self) -> None:
        """Execute the instructions in order. Raises RuntimeError with the output of a RUN that fails."""
        for keyword, rest in self.instructions:
            match keyword:
                case "ENV" | "ARG":
                    self._set(rest, keeps_former=keyword == "ARG")
                case "WORKDIR":
                    self.folder = Path(self.placed(rest))
                    self.folder.mkdir(parents=True, exist_ok=True)
                case "COPY":
                    self._copy(*rest.split())
                case "RUN" if rest.startswith("apt-get"):
                    self.left_out.append(rest)
                case "RUN":
                    done = self._execute(["bash", "-o", "pipefail", "-c", self.placed(rest)])
                    if done.returncode:
                        raise RuntimeError(f"RUN {rest}\n{done.stdout[-3000:]}")
                case "ENTRYPOINT":
                    self._enter_by(words(rest))
                case "CMD":
                    self.command = words(rest)
                case "FROM" | "LABEL" | "USER" | "VOLUME" | "SHELL":
                    self.left_out.append(f"{keyword} {rest}")
                case _:
                    raise RuntimeError(
                        f"{keyword} is executed nowhere here: teach tests/support/dockerfile.py what it does."
                    )

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess:
        """Run a command as `docker run` does without an entry point, with the output in one text."""
        return self._execute([self.placed(word) for word in command], **environment)

    def run_default(self, *more: str, **environment: str) -> subprocess.CompletedProcess:
        """Run the entry point on the default command and more words, as `docker run` does; tini is left out."""
        return self._execute(["bash", self.entrypoint, *map(self.placed, self.command), *more], **environment)

    def _enter_by(self, command: list[str]) -> None:
        """Note the script that tini starts, with its folders moved."""
        self.entrypoint = self.placed(command[command.index("--") + 1])
        script = Path(self.entrypoint)
        script.write_text(self.placed(script.read_text()))

    def _set(self, text: str, keeps_former: bool) -> None:
        for assignment in shlex.split(text):
            name, is_set, value = assignment.partition("=")
            if is_set and not (keeps_former and name in self.env):
                self.env[name] = string.Template(self.placed(value)).safe_substitute(self.env)

    def _copy(self, source: str, target: str) -> None:
        if source != ".":
            shutil.copy(self.context / source, self.folder / target)
            return
        listed = subprocess.run(
            ["git", "-C", str(self.context), "ls-files", "-z"], capture_output=True, check=True, text=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (self.context / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.context / name, self.folder / name)

    def _execute(self, command: list[str], **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command, cwd=self.folder, env=self.env | environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
