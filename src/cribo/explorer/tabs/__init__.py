"""The tabs of the page, a file each: fields, buttons, and which function fills what; pictures are made elsewhere."""
