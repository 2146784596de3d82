"""What became of a model: costs against dense, sparsity, fusion, repeats, and a picture."""
