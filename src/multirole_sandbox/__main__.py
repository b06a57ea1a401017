"""Run the self-test of the sandbox on this machine: `python -m multirole_sandbox`. The exit code is 1 if a program escapes."""

import sys

import multirole_sandbox as sandbox


def main() -> int:
    """Print the level of the sandbox and the result of a program, or why programs cannot be run here."""
    try:
        level = sandbox.require()
    except sandbox.SandboxError as error:
        print(error, file=sys.stderr)
        return 1
    verdict = sandbox.grade("print(int(input()) * 2)", [{"input": "21", "output": "42"}])
    print(f"The sandbox works at the level {level}. A program that doubles a number has the reward {verdict.reward:g}.")
    return 0 if verdict.reward == 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
