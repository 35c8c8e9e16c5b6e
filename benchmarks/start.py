"""Measures the start-up time of commands that do not need torch; the target is `lapclip --help` under 0.3 s.

python benchmarks/start.py
"""

import statistics
import subprocess
import sys
import time

CASES = (["--help"], ["train", "--help"], ["train", "--minuts", "3"], ["--version"])


def main() -> None:
    for arguments in CASES:
        took = []
        for _ in range(15):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-m", "lapclip", *arguments], capture_output=True, check=False)
            took.append(time.perf_counter() - started)
        words = " ".join(["lapclip", *arguments])
        print(f"{words:28} median {statistics.median(took):.3f} s, from {min(took):.3f} to {max(took):.3f}")


if __name__ == "__main__":
    main()
