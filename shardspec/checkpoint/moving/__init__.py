"""Moving bytes from stored boxes to where they are wanted, checked on the way."""
