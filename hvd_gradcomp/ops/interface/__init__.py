"""What each verb means, by subject. A *composite* is made of others, once for all.

A backend may shadow a composite with its better way, if the result is the same to the bit; of
`project` and `lift`, which multiply matrices, but for rounding. `ops/torch/` and `ops/tensorflow/`
have the same rooms.
"""
