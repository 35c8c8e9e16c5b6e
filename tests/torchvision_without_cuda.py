"""Lets torchvision be imported beside a CPU build of torch on Linux, where its wheel is for CUDA.

Its compiled operators cannot be loaded there, and importing it fails at the first one it extends. These two are
declared just before it is imported; nothing that is tested calls them. Everywhere else nothing is done.
"""

import importlib.abc
import sys

SCHEMAS = ("nms", "qnms")
kept = []


class Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and sys.platform == "linux":
            sys.meta_path.remove(self)
            import torch

            if not torch.cuda.is_available():
                kept.append(torch.library.Library("torchvision", "FRAGMENT"))
                for operator in SCHEMAS:
                    kept[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, Declare())
