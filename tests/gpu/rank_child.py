"""One rank of a short training run on GPUs 0 and 1: ``rank_child.py DATA OUTPUT EPOCHS``; prints the weight digest."""

from __future__ import annotations

import sys

from renaissance import (
    GLOBAL_SETTING,
    PREPROCESSOR_SETTING,
    SGD,
    BluePrint,
    CenterCrop,
    ConstantLR,
    CrossEntropyLoss,
    DeepLearningTask,
    NormMode,
    RandomCrop,
    RenaissanceError,
    bn,
    conv,
    fc,
    gap,
    relu,
    seq,
)


def main(data: str, output: str, epochs: int) -> None:
    GLOBAL_SETTING.use_gpu("0,1").amp(True).manual_seed(5).global_batch_size(32).input_resolution(16)
    PREPROCESSOR_SETTING.dataset("mnist", data).preprocess_workers(1).normalization(NormMode.MNIST)
    PREPROCESSOR_SETTING.train_transforms(RandomCrop(16)).val_transforms(CenterCrop(16)).commit()
    net = BluePrint(seq(conv(16, 3, 1, 1), bn(), relu(), conv(32, 3, 2, 1), relu(), gap(), fc(10)))
    task = DeepLearningTask().model(net).total_epochs(epochs).loss(CrossEntropyLoss()).output(output)
    task.optimizer(SGD().momentum(0.9)).scheduler(ConstantLR().base_lr(0.1)).learning_curves(False)
    with task:
        task.compile()
        print(f"rank {task.rank} trains", file=sys.stderr, flush=True)
        print("digest", task.run().weight_digest, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except RenaissanceError as error:
        sys.exit(f"error: {error}")
