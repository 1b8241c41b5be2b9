"""The tabs of the page, a file each: fields, buttons, and which function fills what. What is shown is made elsewhere."""
