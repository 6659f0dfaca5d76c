"""Links measured on the user's own machines: times of steps, and the links that fit them."""
