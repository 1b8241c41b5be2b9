"""Object discovery: one object per image, found by the similarity of its patches."""
