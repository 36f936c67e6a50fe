"""Several processes that train together on one machine: who they are, how they meet, what they tell each other.

No gradients travel here; a backend's collectives carry those.
"""
