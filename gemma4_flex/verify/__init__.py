"""Proof that the engine computes what Hugging Face computes: a float64 reference and the comparison of all three."""
