package mirror;

/** Says what a child process gets. */
final class Child {
    private Child() {}

    public static void main(String[] words) {
        System.out.print(System.getenv() + " " + System.getProperty("user.dir"));
    }
}
