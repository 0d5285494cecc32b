"""What passes with stock Horovod and not with this package: deliberate refusals, nothing else."""

NOT_FINITE = (
    "a NonFiniteGradientError: the test trains without bound until its gradients overflow, which "
    "is refused by default; nonfinite='propagate' does what stock does"
)

NO_SECOND_EXCHANGE = (
    "no warning that step() behind synchronize() exchanges once more: it does not, here"
)

REFUSED: dict[str, str] = {
    "parallel/test_torch.py::TorchTests::test_dynamic_requires_grad": NOT_FINITE,
    "parallel/test_torch.py::TorchTests::test_synchronize_step_warning": NO_SECOND_EXCHANGE,
}
