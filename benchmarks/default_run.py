"""Measures the recall of the default run over the validation set for several seeds; a test has the colour baseline.

    python benchmarks/default_run.py --seeds 3     # three minutes of training per seed, plus evaluation

The speed of the machine determines how many pairs are trained on, so each line shows both.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=3.0)
    arguments = parser.parse_args()
    found = []
    for seed in range(arguments.seeds):
        command = [sys.executable, "-m", "lapclip", "train", "--json", "--seed", str(seed)]
        command += ["--minutes", str(arguments.minutes)]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        result = json.loads(done.stdout)
        words = result["recall"]["text_to_image"]
        found.append(words["recall@1"])
        print(
            f"seed {seed}: {result['num_pairs_seen']:,} pairs, {result['pairs_per_second']:.0f} pairs/s,"
            f" recall@1 {words['recall@1']:.1%}, recall@10 {words['recall@10']:.1%}"
            f" over {result['recall']['num_images']} images (chance {words['chance@1']:.1%})",
            flush=True,
        )
    print(f"recall@1 {statistics.mean(found):.1%}, from {min(found):.1%} to {max(found):.1%}")


if __name__ == "__main__":
    main()
