package mirror;

/** Another class of the program, which is loaded when it is asked for. */
final class Neighbour {
    static final String NAME = new String("neighbour");

    private Neighbour() {}
}
