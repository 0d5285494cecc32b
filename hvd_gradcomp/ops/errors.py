"""What a verb raises on all ranks."""


class PayloadError(RuntimeError):
    """What a rank sent cannot be decoded: damaged, foreign, or made for another model."""


class NonFiniteGradientError(FloatingPointError):
    """A rank's gradient has a NaN or an infinity: sent on, it would stay in every state."""
