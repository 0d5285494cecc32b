"""Errors that an op raises on all ranks."""


class PayloadError(RuntimeError):
    """Payload that cannot be decoded: damaged, foreign, or made for another model."""


class NonFiniteGradientError(FloatingPointError):
    """Gradient of a rank with a NaN or an infinity, which would stay in every state."""
