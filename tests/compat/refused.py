"""What passes with stock Horovod and not with this package: deliberate refusals, nothing else."""

NOT_FINITE = (
    "a NonFiniteGradientError: the test trains without bound until its gradients overflow, which "
    "is refused by default; nonfinite='propagate' does what stock does"
)

NO_SECOND_EXCHANGE = (
    "no warning that step() behind synchronize() exchanges once more: it does not, here"
)

SESSION = (
    "a RuntimeError: in a graph of TensorFlow 1 nothing initializes the state of compressors. The "
    "test runs twice, and passes eagerly"
)

NOT_KERAS = "a TypeError: an optimizer of TensorFlow 1, for sessions; takes Keras 3's, and tapes"

ADASUM = (
    "a ValueError: Adasum combines full gradients pair by pair, and cannot work on compressed "
    "ones; on gloo stock Horovod has none either"
)

_SETS = "parallel/test_tensorflow_process_sets.py::TensorFlowProcessSetsTests"

REFUSED: dict[str, str] = {
    "parallel/test_torch.py::TorchTests::test_dynamic_requires_grad": NOT_FINITE,
    "parallel/test_torch.py::TorchTests::test_synchronize_step_warning": NO_SECOND_EXCHANGE,
    f"{_SETS}::test_distributed_gradient_tape_process_sets": SESSION,
    f"{_SETS}::test_legacy_DistributedOptimizer_process_sets": NOT_KERAS,
    "examples/pytorch/pytorch_mnist.py --epochs 1 --use-adasum": ADASUM,
}
