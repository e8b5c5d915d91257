-- Tell a lane's collector something. A lane that is not known stays so.
-- KEYS: meta ctl
-- ARGV: name and value pairs
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
-- "Stop" must get through when memory is full: only a script's first write is refused then, and HDEL never is.
redis.call('HDEL', KEYS[2], '')
for i = 1, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
return 1
