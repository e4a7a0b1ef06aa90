"""The norm of the residual after each iteration."""


def draw(figure, *trials):
    figure.set_size_inches(5, 3)
    axes = figure.subplots()
    for trial, norms in enumerate(trials):
        axes.semilogy(range(1, len(norms) + 1), norms, label=f"trial {trial}")
    axes.set(xlabel="iteration", ylabel="norm of the residual")
    axes.legend(frameon=False)
