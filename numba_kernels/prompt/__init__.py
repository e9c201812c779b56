"""What a prompt's many tokens compute: matrix products and sparse up and down."""
