"""Every second option's price and stock price, and the years until exercise."""


def draw(figure, stock, strike, years, prices):
    figure.set_size_inches(6, 3)
    axes = figure.subplots()
    some = slice(None, None, 2)
    ratio, value = stock / strike, prices / stock
    points = axes.scatter(ratio[some], value[some], s=9, c=years[some], cmap="cool")
    axes.set(xlabel="stock / strike", ylabel="price / stock", xscale="log")
    figure.colorbar(points, label="years")
