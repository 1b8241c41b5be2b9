"""Parts that all rooms share: errors, files, settings, console and drawing. They import nothing else of cribo."""
