"""Object discovery: one object in each image, found by the similarities of its patches."""
