"""Facts about IR modules: constants by content, movement of elements, zeros."""
