"""TensorFlow's and Keras's own parts, as far as an exchange has to do with them.

variables         Keras's and TensorFlow's variables
layers            layers of a model by its variables
moving_averages   averages that Keras's optimizers keep
background_call   calls on a thread of their own
"""
