"""Methods that send all elements in fewer bits.

qsgd, terngrad      unbiased levels
narrow              bfloat16, and a byte an element: FP8, Int8
natural             powers of two
onebit, sign_sgd, signum   signs: 1-bit SGD, EF-SignSGD, Signum
"""
