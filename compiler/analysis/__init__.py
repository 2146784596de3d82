"""Facts about IR modules: constants by content, movement of elements, masks of zeros, bounds."""
