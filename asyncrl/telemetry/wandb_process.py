"""The W&B client, in a process of its own: `python -m asyncrl.telemetry.wandb_process`.

Reads JSON lines: first the arguments of wandb.init, then a row each; the end of input finishes the run.
The client waits for its network in exit handlers, so it must not live in the learner: this process can be
killed without losing anything that metrics.jsonl does not have.
"""

import json
import sys


def main() -> None:
    """Forward rows until the input ends."""
    import wandb  # takes a second, and nobody else needs it

    run = wandb.init(**json.loads(sys.stdin.readline()))
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    run.define_metric("eval/*", step_metric="eval/version")
    for line in sys.stdin:
        run.log(json.loads(line))
    run.finish()


if __name__ == "__main__":
    main()
