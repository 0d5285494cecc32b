"""Methods made of other methods.

wrappers      phases, and momentum after the exchange
balanced      sparse elements, exchanged by owners
robust        means that one rank alone cannot steer
local_steps   settings of local steps, and their sources
schedule      EGC's correction of the learning rate
"""
