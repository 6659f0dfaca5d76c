"""Data movement: steps, their cost, and the communicators that execute them."""
