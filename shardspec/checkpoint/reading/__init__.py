"""What a checkpoint looks like, whatever its form, and what is made sure of before it is used."""
