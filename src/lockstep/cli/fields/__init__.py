"""What a command line may say: the fields, their help, their checks, and the objects that they become."""
