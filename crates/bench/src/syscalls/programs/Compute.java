// Floating point, containers and strings, without a system call in between.
import java.util.HashMap;

public class Compute {
    static double work(int n) {
        double total = 0;
        HashMap<String, Integer> words = new HashMap<>();
        for (int i = 0; i < n; i++) {
            total += Math.sqrt((long) i * i % 7);
            words.merge(String.valueOf(i % 1000), 1, Integer::sum);
        }
        return total + words.size();
    }

    public static void main(String[] arguments) {
        work(2_000_000);
        long begin = System.nanoTime();
        double sum = work(8_000_000);
        long end = System.nanoTime();
        if (!(sum > 0)) throw new IllegalStateException("no sum");
        System.out.println((end - begin) / 1e6);
    }
}
