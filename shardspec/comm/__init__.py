"""How data moves: steps, what they cost, and who carries them out."""
