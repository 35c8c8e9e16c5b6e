"""The 27 systems that the documents describe: where each lives in lapclip, and a command that shows it working."""

from dataclasses import dataclass

NOT_YET = "not yet"


@dataclass(frozen=True)
class System:
    """Where it lives, below `src/lapclip/`, and what to type; without a command it does not exist yet."""

    name: str
    where: str
    command: str = ""


# In the order of the documents; `RUN` is any run.
SYSTEMS = (
    System("CLIP model of two towers with a learned temperature", "model/clip.py",
           "lapclip train synthetic:documents --size small --steps 2"),
    System("synthetic pairs: four categories, 216 + 24", "data/synthetic.py",
           "lapclip data show synthetic:documents"),
    System("character tokenizer of 33 symbols, 77 long", "data/tokenizer.py",
           "lapclip train synthetic:documents --tokenizer characters --minutes 1"),
    System("training on the CPU: AdamW, cosine schedule, clipping, data workers", "train/loop.py",
           "lapclip train synthetic:documents --size small --epochs 15 --device cpu"),
    System("training on a GPU, with a fallback", "machine/device.py", "lapclip train --device auto"),
    System("choice of the device", "autotune/quick.py", "lapclip bench"),
    System("comparison of devices, operation by operation", "bench/ops.py", "lapclip bench --ops --out ops.html"),
    System("live view from a second process", "serve/watch.py", "lapclip watch --web"),
    System("training in the background", "runs/background.py", "lapclip train --background"),
    System("checkpoints, resuming, the best by validation", "weights/checkpoint.py", "lapclip train --resume RUN"),
    System("dynamics: phases, gradients by layer, temperature, difficulty", "view/learning.py",
           "lapclip report RUN"),
    System("time of a step by part", "step/profile.py", "lapclip report RUN"),
    System("memory by kind", "step/profile.py", "lapclip report RUN"),
    System("use of cores and threads", "machine/sensors.py", "lapclip watch RUN"),
    System("temperature, power and energy", "machine/sensors.py", "lapclip report RUN"),
    System("comparison of precisions", "autotune/measure.py", "lapclip bench --size small"),
    System("model sizes up to a billion parameters, and how they scale", "bench/sizes.py", "lapclip bench --sizes"),
    System("speed options: packed images, recomputation, compiling", "data/pack.py", "lapclip bench --compile"),
    System("real data: COCO, Flickr and others", "data/formats/", "lapclip data check FOLDER"),
    System("fine-tuning of pretrained models", "finetune/", "lapclip train FOLDER --from MODEL"),
    System("INT8 inference", NOT_YET),
    System("Core ML export", NOT_YET),
    System("training on several machines", NOT_YET),
    System("data prepared on the CPU while the GPU trains", "data/workers.py", "lapclip train --workers 2"),
    System("deployment: a search page and an API; of exported models not yet", "serve/api.py", "lapclip serve"),
    System("troubleshooting: messages that say what to do", "diagnose/", "lapclip data check FOLDER"),
    System("reproducible runs and a written report", "reproduce/", "lapclip reproduce --quick"),
)  # fmt: skip
