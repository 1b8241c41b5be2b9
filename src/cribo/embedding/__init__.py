"""Export of the features of an image collection to files."""
